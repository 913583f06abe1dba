"""Try out what works with what, and write docs/compatibility.md (minutes on two cores; needs no GPU).

    python tools/compatibility.py
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests import compatibility  # noqa: E402
from tests.speculation.trained import random_head  # noqa: E402

with tempfile.TemporaryDirectory() as folder:
    heads = {name: random_head(name, Path(folder) / name) for name in compatibility.HEADS}
    (ROOT / "docs" / "compatibility.md").write_text(compatibility.page(compatibility.Trial(heads)))
