-- Open the store, and create it when it does not exist.
-- Returns the format, the time of creation and the server's time, in microseconds.

function Verbs.open()
  call('SETNX', B .. ':format', '1')
  call('SETNX', B .. ':born', string.format('%.0f', now))
  return {call('GET', B .. ':format'), call('GET', B .. ':born'), string.format('%.0f', now)}
end
