from tests.cuda.memory import *  # noqa: F403
