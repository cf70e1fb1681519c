"""Write the vectors of all calculators, NAME.json from NAME.py: `python book/site/calculators`."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]

from coursesite.calculators import FOLDER, vectors

for path in sorted(FOLDER.glob("[!_]*.py")):
    path.with_suffix(".json").write_text(vectors(path), encoding="utf-8")
