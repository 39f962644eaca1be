"""A simulated serving engine with a hybrid cache, which checks every byte it loads.

What it computes is a function of the tokens alone, so it can tell what each block must hold without
knowing anything of keys, hashes or objects.
"""

from ._core import SimEngine as Engine
from ._core import SimFinishedRequest as FinishedRequest
from ._core import SimMemory
from ._core import SimRingDetector as RingDetector

__all__ = ["Engine", "FinishedRequest", "RingDetector", "SimMemory"]
