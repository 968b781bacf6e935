"""The mesh: axes, coordinates and the communicator of each axis."""

import pytest

from parallelism.mesh import mesh_shape


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
