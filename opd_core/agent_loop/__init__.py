"""The life of a group: sampled, judged, filtered, scored; then it trains or its end is counted.

``prompts``        the order in which prompts are asked, and what comes back to it
``loop``           :class:`AgentLoop`: one group from its prompt to its final status
``turns``          a rollout while it is sampled: over interruptions, and turns that a tool answers
``functions``      users' functions, run in a process of their own
``judging``        judges run so; ``tools`` run so, and an example, the calculator
``judges``         judges for the shipped tasks
``replay_buffer``  finished groups that may train
``collect``        one train step's worth of groups, and those of the next ones under way
``survivors``      what became of all groups, and whether the losses bias what trains
``parking``        where rollouts wait for a teacher that is away
``evaluation``     held-out accuracy, without any teacher
"""
