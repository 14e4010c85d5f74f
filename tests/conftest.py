"""What holds for every test: how hypothesis searches. Fixtures live beside the tests that use them."""

from hypothesis import settings

# No deadline: a first call may compile or fault pages in. A failure prints the blob that reproduces it.
settings.register_profile("default", deadline=None, print_blob=True, derandomize=False)
settings.load_profile("default")
