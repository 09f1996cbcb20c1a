-- Opening the store: it is made when it is not there. Format 2 added jobs that wait for others, limits and
-- schedules, and reads all of 1; who knows only that would leave them waiting, so it must not open it any more.
--
-- Returns its format, the time it was made at and the server's time, in microseconds.

function Verbs.open()
  local form = call('GET', B .. ':format')
  if not form or form == '1' then call('SET', B .. ':format', '2') end
  call('SETNX', B .. ':born', string.format('%.0f', now))
  return {call('GET', B .. ':format'), call('GET', B .. ':born'), string.format('%.0f', now)}
end
