"""Links the packages as they are imported into build/links/slora_jax, for the type checker.

pyproject.toml maps the folders pallas_kernels, sharding and server into the slora_jax namespace; checkers do
not follow that mapping, so they get a tree in which it is real.
"""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT / "build" / "links" / "slora_jax"

shutil.rmtree(TREE, ignore_errors=True)
TREE.mkdir(parents=True)
mapped = [ROOT / folder for folder in ("pallas_kernels", "sharding", "server")]
for source in [*(ROOT / "slora_jax").iterdir(), *mapped]:
    if source.name != "__pycache__":
        (TREE / source.name).symlink_to(source)
