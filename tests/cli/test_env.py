"""``easydist env``, and what all commands have in common: help, suggestions, completion, import costs."""

import json
import sys

import launching
import pytest
from click.testing import CliRunner

from easydist.cli.env import environment, variables
from easydist.cli.main import main

COMMANDS = sorted(main.commands)


def easydist(*arguments, **environment):
    """Return the output of the command and its errors; with ``PYTHON_EXEC=fork()`` its ranks are forked, too."""
    return launching.forked("-m", "easydist", *arguments, **environment)


@pytest.mark.slow
def test_help_and_completion_load_no_torch():
    """Neither rich: both are for what the commands do."""
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom easydist.cli.main import main\n"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0\n"
        "for name in main.commands: assert CliRunner().invoke(main, [name, '--help']).exit_code == 0\n"
        "env = {'_EASYDIST_COMPLETE': 'bash_complete', 'COMP_WORDS': 'easydist e', 'COMP_CWORD': '1'}\n"
        "print(CliRunner().invoke(main, [], env=env, prog_name='easydist').output)\n"
        "print(*{name.partition('.')[0] for name in sys.modules} & {'torch', 'rich', 'numpy', 'IPython'})\n"
    )
    out, _ = launching.python("-c", code)
    assert out.split() == ["plain,env"]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example(name):
    said = CliRunner().invoke(main, [name, "--help"], prog_name="easydist").output
    assert f"easydist {name}" in said.partition("Example")[2]


def test_variables_of_every_launcher_are_shown():
    env = {"GROUP_RANK": "1", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "4", "RANK": "3", "SLURM_NODEID": "1"}
    env |= {"OMPI_COMM_WORLD_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MV2_COMM_WORLD_LOCAL_SIZE": "1"}
    assert variables(env | {"HOME": "/root"}) == env


def test_wrong_options_and_commands_give_a_suggestion():
    said = CliRunner().invoke(main, ["env", "--jsn"])
    assert said.exit_code == 2
    assert "--json" in said.output
    said = CliRunner().invoke(main, ["envv"])
    assert said.exit_code == 2
    assert "'env'" in said.output


@pytest.mark.slow
def test_python_m_easydist_is_the_command():
    out, _ = easydist("env", "--json", EASYDIST_CHECK="1", TORCHELASTIC_TOKEN="4711")
    found = json.loads(out)
    assert found["versions"]["torch"]
    assert sys.executable in found["system"]["python"]
    assert found["variables"]["EASYDIST_CHECK"] == "1"
    assert "4711" not in out


def test_the_text_has_what_json_has():
    said = CliRunner().invoke(main, ["env"]).output
    for section, rows in environment().items():
        assert section in said.splitlines()
        assert all(name in said for name in rows)
