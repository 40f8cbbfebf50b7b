"""Training the student on Ray.

``batch``    groups → the numbers one train step needs, cut for ranks and micro-batches
``learner``  one rank's model and optimizer: batch in, metrics out
``loop``     the train loop: collect → update → sync weights → evaluate → save; knows no Ray
``models``   loading and saving Hugging Face models and tokenizers
``actors``   the loop's organs as Ray actors
``driver``   the Ray job: builds everything from a run directory and runs the loop
``files``    the files through which flow and job speak
``head``     the command of a private Ray head
``jobs``     the only module that talks to Ray's Jobs API
"""
