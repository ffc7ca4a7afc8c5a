"""``easydist run --on slurm`` where there is no SLURM; tests/slurm has the rest."""

import pytest
from click.testing import CliRunner

from easydist.cli.main import main


def told(*options, status=2):
    done = CliRunner().invoke(main, ["run", *options, __file__], prog_name="easydist")
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--on", "slurm", "-n", "2"], "--on slurm needs srun; run this on a node of the cluster, or in a job"),
        (["--on", "slurm", "-n", "4", "-N", "3"], "4 ranks cannot be equally many on each of 3 nodes"),
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


def test_a_dry_run_needs_no_slurm(monkeypatch):
    monkeypatch.setenv("PATH", "")
    lines = told(
        "--on",
        "slurm",
        "-n",
        "4",
        "-N",
        "2",
        "--gpus-per-rank",
        "1",
        "--slurm",
        "-p 'a b' -t 60",
        "--dry-run",
        status=0,
    )
    head, *options, command, _ = lines.split("\n")
    assert head == "#!/bin/bash"
    own = ["--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--gpus-per-task=1", "-p 'a b' -t 60"]
    assert options == [f"#SBATCH {option}" for option in own]
    assert command.startswith("srun --kill-on-bad-exit=1 ")
    assert command.endswith(f" -u {__file__}")
