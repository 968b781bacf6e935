#!/usr/bin/env bash
# Build an Open MPI that reads and writes CUDA device memory, for machines whose MPI does not.  It needs no GPU, and
# takes Debian's source of Open MPI, from where apt-get finds its packages, and CUDA's headers from CUDA_HOME or, without
# one, from NVIDIA's wheel:
#   hostfiles/build_open_mpi.sh PREFIX
# It takes apt-get, a C compiler, make, perl, and python3 with pip; some 7 minutes on 2 cores; and 12 MB at PREFIX.
set -euo pipefail
PREFIX=$(realpath -m "${1:?usage: hostfiles/build_open_mpi.sh PREFIX}")
JOBS=${JOBS:-$(nproc)}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
cd "$WORK"

# The source, from lists of its own: the machine's stay as they are.
mkdir -p lists/partial parts source include
for list in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    [ ! -e "$list" ] || sed -e 's/^deb /deb-src /' -e 's/^Types:.*/Types: deb-src/' "$list" > "parts/$(basename "$list")"
done
OPTIONS=(-o Dir::Etc::sourcelist=- -o "Dir::Etc::sourceparts=$WORK/parts" -o "Dir::State::lists=$WORK/lists"
    -o "Dir::Cache::pkgcache=" -o "Dir::Cache::srcpkgcache=" -o APT::Sandbox::User=root)
apt-get "${OPTIONS[@]}" update
apt-get "${OPTIONS[@]}" source --download-only openmpi
tar -xf openmpi_*.orig.tar.* -C source --strip-components 1

CUDA=${CUDA_HOME:-}
if [ -z "$CUDA" ]; then
    python3 -m pip download --no-deps --only-binary :all: nvidia-cuda-runtime-cu12
    python3 -m zipfile -e nvidia_cuda_runtime_cu12-*.whl wheel
    CUDA=$WORK/wheel/nvidia/cuda_runtime
fi

# The library opens libcuda when it starts.  Only what the ranks of a job need is built.
cd source
./configure --prefix="$PREFIX" --with-cuda="$CUDA" --disable-oshmem --disable-io-romio --enable-mpi-fortran=no \
    --with-hwloc=internal --with-libevent=internal --with-pmix=internal \
    --without-ucx --without-verbs --without-ofi --without-psm --without-psm2 \
    --enable-mca-no-build=io,fcoll,fbtl,fs,sharedfp,vprotocol CFLAGS="-O2 -std=gnu11 -w"
make -j "$JOBS"
make install-strip
"$PREFIX/bin/ompi_info" --parsable --all | grep mpi_built_with_cuda_support:value:true
echo "built: PATH=$PREFIX/bin:\$PATH mpirun ...; python hostfiles/link_mpi.py has mpi4py load it"
