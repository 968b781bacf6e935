# Spack's recipe.  Copy it into a repository of packages, as packages/py_handwritten_collectives/package.py; then, from
# this checkout:
#
#     spack develop --path $PWD py-handwritten-collectives@0.1.0
#     spack install py-handwritten-collectives@0.1.0 +train ^openmpi
#
# Versions are those of pyproject.toml.

from spack.package import default_args, depends_on, license, requires, variant, version  # noqa: A004
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHandwrittenCollectives(PythonPackage):
    """Hand-written collective communication over MPI, and parallel training on top of it."""

    version("0.1.0")
    license("Apache-2.0")

    variant("torch", default=False, description="Collectives on torch tensors, and torch.distributed's backend")
    variant("plots", default=False, description="Charts of benchmarks and of training")
    variant("train", default=False, description="What training from a checkout needs; implies torch and plots")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("mpi", type=("build", "link", "run"))
    with default_args(type=("build", "run")):
        depends_on("py-ml-dtypes@0.5:")
        depends_on("py-mpi4py@4.1:")
        depends_on("py-numba@0.61:")
        depends_on("py-numpy@2:")
        depends_on("py-tqdm@4.66:")
        depends_on("py-torch@2.6:", when="+torch")
        depends_on("py-matplotlib@3.8:", when="+plots")
        depends_on("py-isal@1.7:", when="+train")
        depends_on("py-safetensors@0.5:", when="+train")

    requires("+torch", when="+train")
    requires("+plots", when="+train")
