from tests.cuda.attention_property import *  # noqa: F403
