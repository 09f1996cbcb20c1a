"""The AMQP protocol: connections, channels, consumers, credit, confirms and frames."""
