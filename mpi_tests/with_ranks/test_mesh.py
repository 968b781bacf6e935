"""The mesh: axes, coordinates and the communicator of each axis."""

import numpy as np
import pytest

from parallelism.mesh import AXES


@pytest.mark.sizes(8)
@pytest.mark.parametrize("shape", [(8, 1, 1, 1), (2, 1, 2, 2), (1, 2, 4, 1), (2, 2, 1, 2)])
def test_each_axis_has_the_ranks_that_differ_in_it_only(comm, shape):
    from parallelism.mesh import Mesh

    mesh = Mesh(comm, **dict(zip(AXES, shape, strict=True)))
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


@pytest.mark.sizes(8)
def test_an_axis_of_any_name_and_one_within_another(comm):
    from parallelism.mesh import Mesh, Within

    mesh = Mesh(comm, rows=2, dp=4, ep=Within("dp", 2))
    ranks = np.arange(8).reshape(2, 2, 2)
    row, group, in_group = (int(i[0]) for i in np.where(ranks == comm.rank))
    assert mesh.coords == {"rows": row, "dp": 2 * group + in_group, "dp/ep": group, "ep": in_group}
    mine = np.array([comm.rank])
    assert mesh.ep.all_gather(mine).tolist() == ranks[row, group].tolist()
    assert mesh.along("dp/ep", "rows").all_gather(mine).tolist() == ranks[:, :, in_group].ravel().tolist()
    assert mesh["dp"].all_gather(mine).tolist() == ranks[row].ravel().tolist()
    assert mesh.tp.size == mesh["no such axis"].size == 1
    mesh.free()
