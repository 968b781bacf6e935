import threading

import pytest

from training.data.prefetch import ahead


def test_items_come_in_order():
    assert list(ahead(range(100))) == list(range(100))


def test_items_are_ready_before_they_are_asked_for():
    third = threading.Event()

    def items():
        for number in range(4):
            if number == 2:
                third.set()
            yield number

    coming = ahead(items(), 2)
    assert next(coming) == 0
    assert third.wait(10)
    assert list(coming) == [1, 2, 3]


def test_an_exception_comes_in_its_items_place():
    def items():
        yield 1
        raise KeyError("two")

    coming = ahead(items())
    assert next(coming) == 1
    with pytest.raises(KeyError, match="two"):
        next(coming)


def test_closing_ends_the_thread():
    coming = ahead(iter(int, 1), 2)
    next(coming)
    coming.close()
    assert not any(thread.name.startswith("input") for thread in threading.enumerate())
