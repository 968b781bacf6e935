# shellcheck shell=bash
# Set what mpirun and its ranks need.  A checkout's .venv/bin/activate ends with it; beside a wheel:
#     source "$(collectives-hostfiles)/activate.sh"
if [ -n "${BASH_SOURCE:-}" ]; then hostfiles=$(dirname "${BASH_SOURCE[0]}"); else hostfiles=$(dirname "$VIRTUAL_ENV")/hostfiles; fi
set -a
. "$hostfiles/mpi.env"
if [ "$(getconf _NPROCESSORS_ONLN)" -le 8 ] || [ -e /.dockerenv ] || [ -e /run/.containerenv ] || [ -n "${APPTAINER_NAME:-}" ]; then
    . "$hostfiles/small.env"
fi
set +a
unset hostfiles
# A system's MPI, linked by the name that mpi4py asks for, which is not always its own.
if [ -L "$VIRTUAL_ENV/lib/libmpi.so.12" ]; then
    export LD_LIBRARY_PATH="$VIRTUAL_ENV/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
