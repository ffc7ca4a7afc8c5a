"""``easydist run --on slurm`` where there is no SLURM; tests/slurm has the rest."""

import io

import pytest
from click.testing import CliRunner

from easydist.cli import on_slurm
from easydist.cli.main import main


def told(*options, status=2):
    done = CliRunner().invoke(main, ["run", *options, __file__], prog_name="easydist")
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--on", "slurm", "-n", "2"], "--on slurm needs srun; run this on a node of the cluster, or in a job"),
        (["--on", "slurm", "-n", "4", "-N", "3"], "4 ranks cannot be divided evenly among 3 nodes"),
        (["--on", "slurm", "-n", "2", "-N", "0"], "--on slurm takes at least one rank and one node"),
        (["--on", "slurm", "-n", "0"], "--on slurm takes at least one rank and one node"),
        (["--on", "slurm", "--gpus-per-rank", "0.5"], "--on slurm takes whole numbers of CPUs and GPUs"),
        (["--on", "slurm", "--slurm=-J 'a"], "No closing quotation"),
        (["--on", "slurm", "--nnodes", "2"], "--on slurm does not take --nnodes; use --nodes"),
        (["--on", "slurm", "--max-restarts", "3"], "--on slurm does not take --max-restarts"),
        (["--dry-run"], "--dry-run needs --on slurm"),
        (["--slurm", "-p gpu"], "--slurm needs --on slurm"),
        (
            ["--on", "slurm", "--slurm", "--time=60"],
            'argument --slurm: expected one argument: write --slurm="--time=60"',
        ),
        (["-N", "2"], "--nodes needs --on ray or slurm; did you mean --nnodes?"),
    ],
)
def test_what_cannot_be_is_refused(monkeypatch, options, text):
    monkeypatch.setenv("PATH", "")
    assert text in told(*options)


def test_a_dry_run_needs_no_slurm(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "key").write_text("k" * 40)
    (tmp_path / "key").chmod(0o600)
    options = ["-n", "4", "-N", "2", "--cpus-per-rank", "3", "--slurm", "-p 'a b' -t 60"]
    options += ["--job-key", f"{tmp_path}/key"]
    monkeypatch.setenv("EASYDIST_JOB_KEY", "set by the command; this removes it")
    said = told("--on", "slurm", *options, "--dry-run", status=0)
    head, *lines, command, _ = said[said.index("#!") :].split("\n")
    assert head == "#!/bin/bash"
    own = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=3"]
    assert lines == [
        *(f"#SBATCH {option}" for option in [*own, "-p 'a b' -t 60"]),
        "export OMP_NUM_THREADS=${OMP_NUM_THREADS:-3} PYTHONUNBUFFERED=1",
        f'export EASYDIST_JOB_KEY="$(cat {tmp_path}/key)"',
    ]
    assert command.startswith(" ".join(["srun --kill-on-bad-exit=1 --label", *own, ""]))
    assert command.endswith(f" -u {__file__}")


def test_lines_are_whole_and_those_of_srun_unchanged():
    shown, ended = io.StringIO(), []
    long = "x" * 1024
    killed = "srun: error: n1: task 1: Killed"
    parts = [f" 0: {long}", "11: b\rc", f" 0: {long}", " 0: y", killed, f"11: {long}", "11: ", f"11: {long}"]
    on_slurm._show(io.BytesIO("".join(f"{part}\n" for part in parts).encode()), shown, ended)
    assert shown.getvalue().split("\n") == [
        "[rank 11] b\rc",
        f"[rank 0] {long}{long}y",
        killed,
        f"[rank 11] {long}",
        f"[rank 11] {long}",
        "",
    ]
    assert [one.status for one in ended] == [137]
