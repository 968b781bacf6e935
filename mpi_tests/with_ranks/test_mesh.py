"""The mesh: axes, coordinates and the communicator of each axis."""

import numpy as np
import pytest

from parallelism.mesh import AXES


@pytest.mark.sizes(8)
@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (2, 1, 2, 2), (1, 2, 4, 1), (2, 2, 1, 2)])
def test_each_axis_has_the_ranks_that_differ_in_it_only(comm, shape):
    from parallelism.mesh import Mesh

    mesh = Mesh(comm, *shape)
    ranks = np.arange(8).reshape(shape)
    position = tuple(int(i[0]) for i in np.where(ranks == comm.rank))
    assert mesh.coords == dict(zip(AXES, position, strict=True))
    for axis, name in enumerate(AXES):
        along = getattr(mesh, name)
        expected = np.moveaxis(ranks, axis, -1)[position[:axis] + position[axis + 1 :]]
        assert along.all_gather(np.array([comm.rank])).tolist() == expected.tolist()
        assert along.rank == position[axis]


@pytest.mark.sizes(2, 3)
def test_a_wrong_mesh_is_refused_on_all_ranks(comm):
    from collectives import InputError
    from parallelism.mesh import Mesh

    with pytest.raises(InputError, match=f"mpirun started {comm.size}"):
        Mesh(comm, dp=5)
