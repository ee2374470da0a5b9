from tests.cuda.attention import *  # noqa: F403
