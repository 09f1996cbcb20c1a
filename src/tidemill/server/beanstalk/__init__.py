"""The beanstalk port: every client of beanstalkd can work with the queues. A tube is a queue.

The port follows ``doc/protocol.txt`` of beanstalkd 1.12, and its ``prot.c`` where the text is
silent.

    listener      the port: opening, draining, closing
    connection    one client's connection
    parser        bytes to commands
    commands      the effect of each command, except those in reserve
    reserve       the commands that reserve jobs
    replies       the replies
    client        the state of one client: its tubes and reservations
    shared_state  the state that all clients share
    bodies        the bodies of jobs as clients see them
    job_numbers   the numbers of jobs
    stats, tubes  statistics, and the tubes
"""
