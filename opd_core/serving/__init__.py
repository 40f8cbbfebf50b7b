"""Servers: launching them, proving that teachers score, and the embedded teacher.

servers.py       the servers that a run starts: the teachers', and those that sample the student
commands.py      how each backend's server is started and stopped
keyed_launch.py  starts a server with its key inside the process, out of the command line
child.py         a server as an order to the supervisor
readiness.py     from "the process runs" to "it scores": health, then a scoring round trip
life.py          signs of life during a run, and what they say
kept/            a teacher that is kept across runs, by a keeper that outlives the command
probe/           "can I distil from this endpoint?"
embedded/        a teacher server of our own that speaks SGLang's protocol and only scores
"""
