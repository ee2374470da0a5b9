from tests.cuda.plan import *  # noqa: F403
