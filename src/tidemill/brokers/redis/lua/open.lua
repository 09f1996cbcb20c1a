-- Open the store, and create it when it does not exist. Format 2 added jobs that wait for others, limits and
-- schedules, and reads all of format 1. A tidemill that knows only format 1 must not open the store: it would never
-- start the jobs that wait for others.
-- Returns the format, the time of creation and the server's time, in microseconds.

function Verbs.open()
  local form = call('GET', B .. ':format')
  if not form or form == '1' then call('SET', B .. ':format', '2') end
  call('SETNX', B .. ':born', string.format('%.0f', now))
  return {call('GET', B .. ':format'), call('GET', B .. ':born'), string.format('%.0f', now)}
end
