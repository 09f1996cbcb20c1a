"""The beanstalk port: every client of beanstalkd can work with the queues. A tube is a queue.

The port follows ``doc/protocol.txt`` of beanstalkd 1.12, and its ``prot.c`` where the text is
silent.

    listener      the port, and the connections of its clients
    parser        bytes to commands, and the replies
    commands      the effect of each command
    shared_state  numbers of jobs, tubes, clients with their reservations, counters
    bodies        the bodies of jobs as clients see them
    stats         statistics
"""
