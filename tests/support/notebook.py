"""Execute docs/quickstart.ipynb and keep its outputs: python tests/support/notebook.py."""

from __future__ import annotations

import base64
import io
import os
import re
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent.parent.parent / "docs" / "quickstart.ipynb"
# A torchvision that is built for another torch than this one can still be imported.
PREPARE = """import warnings
warnings.filterwarnings("ignore", "IProgress")  # tqdm, where ipywidgets is missing
from fastvit_kernels.runtime.compat import define_torchvision_operators
define_torchvision_operators()
import torch
torch.set_num_threads(1)"""


def execute(path: Path) -> Any:
    """The notebook with fresh outputs, and without what changes at every run.

    Raises: nbclient's CellExecutionError where a cell raises.
    """
    nbclient, nbformat = import_module("nbclient"), import_module("nbformat")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell(PREPARE))
    # As a reader runs it: PyTorch's path without a GPU, not the interpreter of conftest.py.
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    nbclient.NotebookClient(notebook, timeout=600).execute(env=environment)
    del notebook.cells[0]
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":  # counted from the reader's first cell
            cell.execution_count -= 1
            for output in cell.outputs:
                if "execution_count" in output:
                    output["execution_count"] -= 1
                if png := output.get("data", {}).get("image/png"):
                    output["data"]["image/png"] = _small(png)
    notebook.metadata.language_info = {"name": "python"}
    return notebook


def _small(png: str) -> str:
    """The picture in 16 colours: a fifth of the bytes."""
    picture = import_module("PIL.Image").open(io.BytesIO(base64.b64decode(png)))
    file = io.BytesIO()
    picture.convert("RGB").quantize(16, dither=0).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def printed(notebook: Any) -> list[str]:
    """What each code cell prints, without numbers, their width and what `measure=` chose; "image"
    for a figure.

    What packages write to stderr depends on which are installed.
    """
    found = []
    for cell in notebook["cells"]:
        text = ""  # of several messages: where one ends is chance
        for output in cell.get("outputs", ()):
            part = output.get("text", "") if output.get("name") != "stderr" else ""
            text += "".join(part) if isinstance(part, list) else part
            text += " image" if "image/png" in output.get("data", {}) else ""
        text = re.sub(r"\d[\d,]*(\.\d+)*(e[-+]\d+)?(\+\w+)?", "N", text)
        text = re.sub(r"(NOT swapped: )?(original N ms, swapped N ms a step).*", r"\2", text)
        found.append(re.sub(" +", " ", text))
    return found


if __name__ == "__main__":
    import_module("nbformat").write(execute(PAGE), PAGE)
