-- The holder of a key: an unfinished job, perhaps with a successor; or, for a time, a job that has succeeded.
--
-- A key is: holder \0 successor. Then \0 and two times of the last of these jobs may follow. The job keeps
-- the key until `ends`, even after success. `since` is the time since which jobs replace each other. A key
-- that a succeeded job holds is: \0, the two times, the id of that job. A sweep removes such keys some time
-- after `ends`; nobody is woken for that, since each reader compares the time.

function Unique.parse(data)
  local cut = string.find(data, '\0', 1, true)
  if cut == 1 then return {ends = unpk('>I8', data, 2), since = 0, over = sub(data, 18)} end
  local next_cut = string.find(data, '\0', cut + 1, true)
  local key = {holder = sub(data, 1, cut - 1), ends = 0, since = 0}
  local successor = sub(data, cut + 1, next_cut and next_cut - 1 or -1)
  if successor ~= '' then key.successor = successor end
  if next_cut then key.ends, key.since = unpk('>I8I8', data, next_cut + 1) end
  return key
end

-- The state of a key; nil when the key is free.
function Unique.find(name)
  local data = call('HGET', K_KEY, name)
  if not data then return nil end
  local key = Unique.parse(data)
  return (key.holder or key.ends > now) and key or nil
end

function Unique.put(name, holder, successor, ends, since)
  local data = holder .. '\0' .. (successor or '')
  if ends > 0 or since > 0 then data = data .. '\0' .. pack('>I8I8', ends, since) end
  call('HSET', K_KEY, name, data)
end

-- Let a job that has succeeded hold its key until a time.
function Unique.hold(name, id, ends)
  call('HSET', K_KEY, name, '\0' .. pack('>I8I8', ends, 0) .. id)
  call('ZADD', B .. ':held', text_of(ends), name)
end

-- A job has ended, or was forgotten: its successor takes the key over.
function Unique.give_up(j, state)
  local key = Unique.find(j.key)
  if not key then return end
  if j.id == key.successor then
    Unique.put(j.key, key.holder, nil, 0, 0)
  elseif j.id ~= key.holder then
    return
  elseif key.successor then
    Unique.put(j.key, key.successor, nil, key.ends, key.since)
    local waiting = load_job(key.successor)
    unplace(waiting)
    place(waiting, waiting.due)
  elseif state == SUCCEEDED and key.ends > now then
    Unique.hold(j.key, j.id, key.ends)
  else
    call('HDEL', K_KEY, j.key)
  end
end

-- Free the key of a finished job that is deleted.
function Unique.forget(j)
  local key = Unique.find(j.key)
  if key and key.over == j.id then call('HDEL', K_KEY, j.key) end
end

-- Forget up to `most` keys whose time of holding is over; returns how many were checked.
function Unique.sweep(most)
  if is_sealed() then return 0 end
  local names = call('ZRANGEBYSCORE', B .. ':held', '-inf', now, 'LIMIT', 0, most)
  for _, name in ipairs(names) do
    local data = call('HGET', K_KEY, name)
    local key = data and Unique.parse(data)
    if key and key.over and key.ends <= now then call('HDEL', K_KEY, name) end -- else another job has the key by now
  end
  call_all('ZREM', B .. ':held', names)
  return #names
end
