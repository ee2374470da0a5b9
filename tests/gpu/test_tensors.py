from tests.cuda.tensors import *  # noqa: F403
