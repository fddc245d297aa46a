"""Write tour.ipynb from tour.md: one cell of code for each block, without its prompts and results.

python docs/notebook.py            writes it beside this file; tests/test_docs.py says whether it is what this writes now
"""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def notebook(page: str) -> str:
    """The page as a notebook (nbformat 4.5), nothing run."""
    cells = []
    for index, part in enumerate(re.split(r"^```python\n(.*?)^```\n", page, flags=re.M | re.S)):
        if index % 2:
            text = "".join(example.source for example in doctest.DocTestParser().get_examples(part))
            text = text.replace("figure = df.plots", "df.plots")  # the notebook shows a cell's last value
        else:
            text = part.replace("The same cells are a [notebook](tour.ipynb)", "This notebook is docs/tour.md")
        code = {"cell_type": "code", "execution_count": None, "outputs": []}
        kind: dict[str, Any] = code if index % 2 else {"cell_type": "markdown"}
        raises = {"tags": ["raises-exception"]} if "Traceback" in part else {}  # so that "run all" goes on
        cells.append(
            kind | {"id": f"cell-{index}", "metadata": raises, "source": text.strip().splitlines(keepends=True)}
        )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(made, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (HERE / "tour.ipynb").write_text(notebook((HERE / "tour.md").read_text()))
