"""Tests of the installed files, and of the statements about them in setup.cfg and the documents."""

import configparser
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import launching
import pytest
from click.testing import CliRunner

import easydist
from easydist.cli.env import environment
from easydist.cli.main import main

ROOT = Path(__file__).parent.parent

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")


@pytest.mark.slow
def test_a_wheel_has_types_and_licence(tmp_path):
    pytest.importorskip("setuptools", "77")
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    source = tmp_path / "source"
    shutil.copytree(ROOT / "easydist", source / "easydist", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    process = launching.start(sys.executable, "-c", build, tmp_path, cwd=source)
    ((_, err),) = launching.finished(process)
    assert process.returncode == 0, err
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(name for name in names if name.endswith("/METADATA"))).decode()
    modules = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "easydist").rglob("*.py*") if path.suffix != ".pyc"
    }
    assert modules | {"easydist/py.typed"} == {name for name in names if name.startswith("easydist/")}
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    assert "License: Apache-2.0" in metadata
    assert "Classifier: Typing :: Typed" in metadata


def test_nobody_is_told_to_install_another_package_of_this_name():
    """The package index has an ``easydist`` of other people: this one is installed from a checkout or a wheel."""
    folders = ["easydist", "docs", "examples", "tests", "benchmarks"]
    paths = [path for name in folders for path in (ROOT / name).rglob("*") if path.suffix in (".py", ".md", ".ipynb")]
    lines = [line for path in [*paths, *ROOT.glob("*.md")] for line in path.read_text().splitlines()]
    told = [line for line in lines if re.search(r"pip install .*\beasydist\b", line)]
    assert [line for line in told if "in the checkout of easydist" not in line] == []


def test_the_version_is_written_once_and_the_name_of_the_distribution_only_in_setup_cfg(monkeypatch):
    assert SETUP["metadata"]["version"] == "attr: easydist.base.version.VERSION"
    assert f"version: {easydist.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    of = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: of("torch" if name == "torch" else "not installed"))
    assert easydist.__version__ in CliRunner().invoke(main, ["--version"], catch_exceptions=False).output
    assert environment()["versions"]["easydist"] == easydist.__version__


@pytest.mark.parametrize(
    ("version", "unreleased", "error"),
    [
        ("0.1.0.dev0", "", None),
        ("0.1.0", "<!-- how to add a line -->", None),
        ("0.2.0", "", "CHANGELOG.md has no section '## [0.2.0] - YYYY-MM-DD' for version 0.2.0"),
        (
            "0.1.0",
            "### Fixed\n\n- a line",
            "CHANGELOG.md has changes under Unreleased: move them to the section of 0.1.0",
        ),
    ],
)
def test_a_release_needs_a_dated_section_with_all_changes(tmp_path, version, unreleased, error):
    for name, text in {
        "easydist/base/version.py": f'VERSION = "{version}"\n',
        "CHANGELOG.md": f"# Changelog\n\n## [Unreleased]\n\n{unreleased}\n\n## [0.1.0] - 2026-11-29\n\n- a line\n",
        ".ci/release": (ROOT / ".ci" / "release").read_text(),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    env = {"PATH": os.environ["PATH"], "BIN": "no such folder"}  # ends it after these checks
    done = subprocess.run(["bash", tmp_path / ".ci" / "release"], env=env, capture_output=True, text=True)
    assert done.returncode != 0
    assert (error or "no such folder") in done.stderr


def test_the_changelog_is_ready_for_a_release():
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])


def test_every_requirement_is_used():
    required = re.findall(r"^[\w-]+", SETUP["options"]["install_requires"], re.MULTILINE)
    code = "\n".join(path.read_text() for path in (ROOT / "easydist").rglob("*.py"))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)", code, re.MULTILINE))
    assert {name.replace("-", "_") for name in required} - imported == {"safetensors"}  # the format's own library


def test_the_classifiers_name_the_pythons_that_are_promised():
    lowest = int(SETUP["options"]["python_requires"].removeprefix(">=3."))
    named = [int(minor) for minor in re.findall(r"Python :: 3\.(\d+)$", SETUP["metadata"]["classifiers"], re.MULTILINE)]
    assert named == list(range(lowest, named[-1] + 1))
