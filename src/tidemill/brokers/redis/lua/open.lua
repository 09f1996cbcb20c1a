-- Opening the store: it is made when it is not there.
--
-- Returns its format, the time it was made at and the server's time, in microseconds.

call('SETNX', B .. ':format', '1')
call('SETNX', B .. ':born', string.format('%.0f', now))
return {call('GET', B .. ':format'), call('GET', B .. ':born'), string.format('%.0f', now)}
