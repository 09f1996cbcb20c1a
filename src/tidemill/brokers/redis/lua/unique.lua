-- Who has a key: an unfinished job, and perhaps its successor; or, for a time, one that has succeeded.
--
-- A key is: holder \0 successor, and if there are any, \0 and two times, which belong to the last in line: up to
-- when it has the key also when it has succeeded, and since when jobs replace each other. Of one that is only held
-- still: \0, the times, and the id of the job that has succeeded. Those are swept away some time after: nobody is
-- woken for it, and whoever asks reads the time.

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

-- Who has it; nil when it is free.
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

-- Have a job that has succeeded hold its key until a time.
function Unique.hold(name, id, ends)
  call('HSET', K_KEY, name, '\0' .. pack('>I8I8', ends, 0) .. id)
  call('ZADD', B .. ':held', text_of(ends), name)
end

-- A job has ended, or was forgotten: who waited for its key takes it over.
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

-- Somebody deletes a job that has finished: it no longer holds a key.
function Unique.forget(j)
  local key = Unique.find(j.key)
  if key and key.over == j.id then call('HDEL', K_KEY, j.key) end
end

-- Forget keys that were held for a time which is over; how many, at most `most`.
function Unique.sweep(most)
  if is_sealed() then return 0 end
  local names = call('ZRANGEBYSCORE', B .. ':held', '-inf', now, 'LIMIT', 0, most)
  for _, name in ipairs(names) do
    local data = call('HGET', K_KEY, name)
    local key = data and Unique.parse(data)
    if key and key.over and key.ends <= now then call('HDEL', K_KEY, name) end -- else it is another's by now
  end
  call_all('ZREM', B .. ':held', names)
  return #names
end
