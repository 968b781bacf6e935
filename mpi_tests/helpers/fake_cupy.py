"""A stand-in for CuPy, for the doctor's child: as much of it as that uses.  FAKE_GPU=broken adds up wrongly."""

import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np


def arange(count):
    return np.arange(count + (os.environ.get("FAKE_GPU") == "broken"))


runtime = SimpleNamespace(getDeviceCount=lambda: 1, getDeviceProperties=lambda index: {"name": b"Fake GPU"})
cuda = SimpleNamespace(runtime=runtime, Device=nullcontext)
