"""A real SLURM cluster of two nodes on this machine, private to this test process."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import launching
import psutil
from launching import free_port, within

PROGRAMS = "munged", "slurmctld", "slurmd", "srun"
NODES = {"n1": "127.0.0.21", "n2": "127.0.0.22"}

CONFIGURATION = """
ClusterName=tests
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.sock
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
TaskProlog={folder}/prolog
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=2
ReturnToService=2
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=2 MaxTime=INFINITE State=UP
"""


def missing():
    """Return what a machine lacks for such a cluster; empty if nothing."""
    if absent := [name for name in PROGRAMS if not shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")]:
        return f"needs SLURM ({', '.join(absent)} missing): apt-get install slurm-wlm munge"
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        return "SLURM's daemons need root, and a mount namespace for the names of the nodes"
    return ""


class Slurm:
    """The running cluster.

    Args:
        folder: Where its files are.

    Attributes:
        env: The environment for its commands.
    """

    def __init__(self, folder):
        self.folder, self._daemons = folder, {}
        self.env = os.environ | launching.OWN | {"SLURM_CONF": folder / "slurm.conf", "EASYDIST_TEST_PATIENCE": "4"}
        self.env["PATH"] += ":/usr/sbin"
        port = free_port()
        nodes = [
            f"NodeName={name} NodeHostname=localhost NodeAddr={address} Port={free_port()} CPUs=8\n"
            for name, address in NODES.items()
        ]
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, port=port) + "".join(nodes))
        (folder / "hosts").write_text(
            Path("/etc/hosts").read_text() + "".join(f"{at} {name}\n" for name, at in NODES.items())
        )
        (folder / "prolog").write_text("#!/bin/sh\necho export EASYDIST_HOST_ID=$SLURMD_NODENAME\n")
        (folder / "prolog").chmod(0o755)
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o600)
        (folder / "state").mkdir()

    def start(self):
        """Start the daemons, and wait until all nodes are there."""
        at = self.folder
        files = [f"--{what}={at}/munge.{what}" for what in ("pid-file", "log-file", "seed-file")]
        files += [f"--key-file={at}/key", f"--socket={at}/munge.sock"]
        self._begin("munged", "munged", "--foreground", "--force", *files)
        self.until(lambda: (at / "munge.sock").exists())
        self._begin("slurmctld", "slurmctld", "-D")
        for name in NODES:
            self.start_node(name)

    def start_node(self, name):
        """Start the daemon of a node, and wait for it."""
        hosts = f"mount --bind {self.folder}/hosts /etc/hosts && exec slurmd -D -N {name}"
        self._begin(name, "unshare", "-m", "sh", "-c", hosts)
        self.until(lambda: self.run("sinfo", "-h", "-n", name, "-o", "%t").stdout.strip() == "idle")

    def kill_node(self, name):
        """Kill the daemon of a node and all tasks on it, as if it lost its power."""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        marks = {"SLURM_CONF": str(self.env["SLURM_CONF"]), "SLURMD_NODENAME": name}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if marks.items() <= process.environ().items():
                    if (parent := process.parent()) and parent.name() == "slurmstepd":
                        parent.kill()
                    process.kill()

    def _begin(self, name, *command):
        with (self.folder / f"{name}.out").open("w") as out:
            self._daemons[name] = subprocess.Popen(
                command,
                env={name: str(value) for name, value in self.env.items()},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def until(self, is_so):
        """Wait until a function returns true."""
        until = time.monotonic() + within(20)
        while not is_so():
            assert time.monotonic() < until, self.logs()
            time.sleep(0.05)

    def run(self, *command, seconds=60, **options):
        """Run a command, and return the completed process with its output."""
        process = launching.start(*command, env=self.env | options.pop("env", {}), **options)
        ((out, err),) = launching.finished(process, seconds=seconds)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def logs(self):
        """Return what the daemons have written."""
        return "\n".join(f"{path.name}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def close(self):
        """End all jobs and the daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self.until(lambda: not self.run("squeue", "-h").stdout)
        for process in reversed(self._daemons.values()):
            process.send_signal(signal.SIGTERM)
        for process in self._daemons.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(within(5))
            process.kill()
            process.wait()


@contextlib.contextmanager
def slurm_cluster():
    """Start a cluster, yield it, and end it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, because the paths of sockets must be
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)
