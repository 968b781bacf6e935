# The end of .venv/bin/activate: what mpirun and its ranks need.
set -a
. "$(dirname "$VIRTUAL_ENV")/hostfiles/mpi.env"
set +a
# A system's MPI, linked by the name that mpi4py asks for, which is not always its own.
if [ -L "$VIRTUAL_ENV/lib/libmpi.so.12" ]; then
    export LD_LIBRARY_PATH="$VIRTUAL_ENV/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
fi
