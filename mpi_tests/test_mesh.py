"""The mesh: axes, coordinates and the communicator of each axis."""

import numpy as np
import pytest

from parallelism.mesh import AXES, mesh_shape


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3, 1, 1, 1), r"mesh dp=3 x pp=1 x sp=1 x tp=1 makes 3 ranks, but mpirun started 8: .*-np 3"),
        ((8, None, 3, 1, 1), r"pp=3 x sp=1 x tp=1 = 3 does not divide the 8 ranks"),
        ((8, 0, 1, 1, 1), r"mesh axis dp=0 must be at least 1"),
        ((2, None, 2, 2, 1), r"= 4 does not divide the 2 ranks"),
    ],
)
def test_axes_that_do_not_multiply_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        mesh_shape(*arguments)


def test_dp_is_what_the_other_axes_leave():
    assert mesh_shape(8, None, 2, 1, 2) == {"dp": 2, "pp": 2, "sp": 1, "tp": 2}


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
