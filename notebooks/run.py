"""Execute the notebooks, each in a process of its own.

    python notebooks/run.py                          # all; nothing is written, a cell that raises ends it
    python notebooks/run.py 02_one_tree_many_beams   # some
    python notebooks/run.py --write                  # and keep the outputs; on a quiet machine, for some are timings

What is kept is what a reader needs: no warnings of imports, no times of execution.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
LONGEST = 600
"""Seconds that one cell may take."""
PROMISED = 120
"""Seconds that a notebook takes at most, on two cores that do nothing else. Others may use them, so more only warns."""


def notebooks() -> list[Path]:
    """All of them, in order."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path) -> nbformat.NotebookNode:
    """A notebook with new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: if a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=LONGEST,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        resources={"metadata": {"path": str(FOLDER)}},
    ).execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.validate(notebook)
    return notebook


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="of notebooks, without .ipynb (default: all)")
    parser.add_argument("--write", action="store_true", help="write the outputs into the notebooks")
    arguments = parser.parse_args(argv)
    known = {path.stem: path for path in notebooks()}
    unknown = sorted(set(arguments.names) - set(known))
    if unknown:
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(known)}")
    seconds = {}
    for name in arguments.names or known:
        start = time.perf_counter()
        executed = execute(known[name])
        seconds[name] = time.perf_counter() - start
        print(f"{name}: {seconds[name]:.0f} s", flush=True)
        if arguments.write:
            known[name].write_text(nbformat.writes(executed) + "\n", encoding="utf-8")
    late = [f"{name} ({taken:.0f} s)" for name, taken in seconds.items() if taken > PROMISED]
    if late:
        print(f"WARNING: longer than the {PROMISED} s of a quiet machine: {', '.join(late)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
