from tests.cuda.decode import *  # noqa: F403
