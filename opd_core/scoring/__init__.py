"""Teachers as seen from the student: ask for the logprobs of sampled tokens, believe nothing
unchecked.

``wire``    the two request and answer formats, and every check an answer must pass
``client``  :class:`TeacherLogprobClient`: one teacher, one limit, one retry layer
``transport`` many requests at once over small connection pools
``routing`` which teacher scores which ``data_source``
``proof``   the scoring round trip that decides whether an endpoint is ready
"""
