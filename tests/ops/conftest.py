import gc

import pytest

import software_gpu


def pytest_collection_finish():
    """Thousands of tests are no garbage: nobody need look at them again and again."""
    gc.collect()
    gc.freeze()


if software_gpu.ON:

    @pytest.fixture(autouse=True)
    def no_problems():
        """A kernel that did wrong fails the test that launched it, and no other."""
        software_gpu.take_problems()
        yield
        problems = software_gpu.take_problems()
        assert not problems, problems
