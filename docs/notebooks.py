"""Runs the notebooks of docs/notebooks in an empty folder each (`make notebooks`); `--write` keeps their outputs."""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

for path in sorted(Path(__file__).with_name("notebooks").glob("*.ipynb")):
    print(path.name, flush=True)
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        options = {"record_timing": False, "timeout": 900, "kernel_name": "python3"}
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()
    if "--write" in sys.argv:
        for cell in (each for each in notebook.cells if each["cell_type"] == "code"):
            # without warnings of other libraries, which name folders of this machine
            cell["outputs"] = [each for each in cell["outputs"] if each.get("name") != "stderr"]
        nbformat.write(notebook, path)
