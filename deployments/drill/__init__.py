"""``opd drill``: rehearse the end of a run, before it is one on rented GPUs.

``catalogue``  the moments of a run and the ways to end it
``watching``   a run seen from outside: its run directory and ``/proc``, nothing that it says itself
``striking``   how each ending is brought about
``rehearsal``  one drill from start to verdict
``command``    what a person asks for, and what they read
"""
