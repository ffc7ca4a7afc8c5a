from collections import Counter

import pytest
import torch
from rich.console import Console
from rich.table import Table


def pytest_collection_modifyitems(items):
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.slow)


def pytest_terminal_summary(terminalreporter):
    """Show a table of what ran on the GPU, by file."""
    counts, seconds = Counter(), Counter()
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.nodeid.startswith("tests/gpu/"):
                name = report.nodeid.partition("::")[0].removeprefix("tests/gpu/test_gpu_").removesuffix(".py")
                counts[name, outcome] += 1
                seconds[name] += report.duration
    if not seconds:
        return
    title = f"a simulated GPU, torch {torch.__version__}"
    if torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        title = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, torch {torch.__version__}, NCCL {nccl}"
    table = Table("tests/gpu", "passed", "failed", "seconds", title=title)
    for name in sorted(seconds):
        table.add_row(name, *[str(counts[name, outcome]) for outcome in ("passed", "failed")], f"{seconds[name]:.1f}")
    Console(width=100).print(table)
