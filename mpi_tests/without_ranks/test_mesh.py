"""The mesh: axes, coordinates and the communicator of each axis."""

import pytest

from parallelism.mesh import Within, mesh_shape


@pytest.mark.parametrize(
    ("world_size", "axes", "message"),
    [
        (8, (3, 1, 1, 1), r"mesh dp=3 x pp=1 x sp=1 x tp=1 makes 3 ranks, but mpirun started 8: .*-np 3"),
        (8, (None, 3, 1, 1), r"pp=3 x sp=1 x tp=1 = 3 does not divide the 8 ranks"),
        (8, (0, 1, 1, 1), r"mesh axis dp=0 must be at least 1"),
        (2, (None, 2, 2, 1), r"= 4 does not divide the 2 ranks"),
    ],
)
def test_axes_that_do_not_multiply_are_refused(world_size, axes, message):
    with pytest.raises(ValueError, match=message):
        mesh_shape(world_size, **dict(zip(("dp", "pp", "sp", "tp"), axes, strict=True)))


def test_dp_is_what_the_other_axes_leave():
    assert mesh_shape(8, dp=None, pp=2, sp=1, tp=2).lengths == {"dp": 2, "pp": 2, "sp": 1, "tp": 2}
    assert mesh_shape(8, rows=2, columns=None).lengths == {"rows": 2, "columns": 4}


def test_an_axis_within_another_has_neighbours_along_it():
    shape = mesh_shape(8, dp=4, tp=2, ep=Within("dp", 2))
    assert shape.groups("ep") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shape.groups("dp/ep") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups("dp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert shape.coords(6) == {"dp": 3, "tp": 0, "dp/ep": 1, "ep": 1}


@pytest.mark.parametrize("within", [Within("dp", 3), Within("dp", 0), Within("pp", 2)])
def test_an_axis_that_does_not_fit_into_another_is_refused(within):
    with pytest.raises(ValueError, match=f"ep={within.length} must divide {within.axis}="):
        mesh_shape(8, dp=4, tp=2, ep=within)


def test_two_open_axes_are_refused():
    with pytest.raises(ValueError, match="dp, sp are all None"):
        mesh_shape(8, dp=None, sp=None)
