-- Schedules: records under their names, and the order in which they are to be handed out. What is handed
-- out moves to when it would be handed out again, should whoever has it never change it.
--
-- A record is its version, when it is due (seconds, 0 never), and a body that nothing here opens.

local CLAIM = 1000000 -- microseconds, as CLAIM of brokers/schedules.py says

-- Microseconds until the next is to be handed out, 0 when it is; -1 when none will be.
local function next_firing()
  local first = call('ZRANGE', B .. ':firing', 0, 0, 'WITHSCORES')
  return first[1] and math.max(0, first[2] - now) or -1
end

-- Those that are due, at most so many, as (name, record, …).
local function hand_out(most)
  local key, claimed, out = B .. ':firing', {}, {}
  local names = call('ZRANGEBYSCORE', key, '-inf', now, 'LIMIT', 0, most)
  if #names == 0 then return out end
  local again, records = text_of(now + CLAIM), fetch_all(B .. ':schedule', names)
  for i, name in ipairs(names) do
    out[#out + 1] = name
    out[#out + 1] = records[i]
    claimed[#claimed + 1] = again
    claimed[#claimed + 1] = name
  end
  call_all('ZADD', key, claimed)
  return out
end

-- Owners that were told of no time before this one look again.
local function fire_sooner(time)
  for _, owner in ipairs(call('ZRANGEBYSCORE', B .. ':fires', '(' .. string.format('%.0f', time), '+inf')) do hint_owner(owner) end
end
