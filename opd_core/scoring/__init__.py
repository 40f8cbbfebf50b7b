"""Teachers as seen from the student: ask for the logprobs of sampled tokens, believe nothing
unchecked.

``wire``      the two request and answer formats, and every check an answer must pass
``transport`` many requests at once over small connection pools
``asking``    one attempt at one server
``replicas``  the servers behind a teacher's name: sticky, away, back
``limits``    requests and tokens in flight, adaptation, leases
``prefix``    the first of a group goes ahead
``hedging``   asking twice when the first answer is late
``client``    :class:`TeacherLogprobClient`: one teacher, one limit, one retry layer
``facts``     what must be known of a teacher, its canaries included
``proof``     the scoring round trip that decides whether an endpoint is ready
``budget``    how many rollouts may fail before a teacher must prove itself again
``store``     scores that were paid for once
``routing``   which teacher scores which ``data_source``, and whether it is believed
``state``     how scoring goes, told to whoever keeps the teachers alive
"""
