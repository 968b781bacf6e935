"""Run a module whose CuPy, and that of the processes it starts, works on the stand-in."""

import os
import runpy
import sys

from mpi_tests.helpers.cuda_on_host.load import SITE, load_when_imported
from mpi_tests.helpers.launch import ROOT

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), str(ROOT), os.environ.get("PYTHONPATH")]))
    load_when_imported()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
