-- Find the next jobs of a queue for a purge to delete. A call looks at a bounded number of entries.
--
-- A purge goes through these places in turn. Each call returns the place at which the next call goes on:
--   own            the tables of the queue itself, until they are empty
--   due, key, each with a cursor of SCAN   the tables of all scheduled jobs, and keys: they have the scheduled and
--                  waiting jobs of all queues
--   last           the tables of the queue once more, for jobs that came due meanwhile
--   end

local to_purge

do

local PARTITIONS_AT_ONCE = 50
local SCANS = {due = {'ZSCAN', 'key'}, key = {'HSCAN', nil}}

-- Add ready jobs of a line that are in partitions. `ids` may have some already, since they also stand in the line.
local function parked(line, ids, most)
  local there = {}
  for _, id in ipairs(ids) do there[id] = true end
  for _, partition in ipairs(call('SRANDMEMBER', B .. ':parked:' .. line, PARTITIONS_AT_ONCE)) do
    for _, member in ipairs(#ids < most and call('ZRANGE', Partitions.park_of(line, partition), 0, most - #ids - 1) or {}) do
      local id = sub(member, 9)
      if not there[id] then ids[#ids + 1] = id end
    end
  end
end

local function in_own_tables(queue, most)
  -- Jobs that wait for others come first, or the purge of the others would cancel them.
  local ids = call('ZRANGE', B .. ':held:' .. queue, 0, most - 1)
  for _, kind in ipairs(KINDS) do
    local line = B .. ':r:' .. kind .. queue
    for _, member in ipairs(#ids < most and call('ZRANGE', line, 0, most - #ids - 1) or {}) do
      ids[#ids + 1] = sub(member, 9)
    end
  end
  for _, kind in ipairs(KINDS) do
    if #ids < most then parked(kind .. queue, ids, most) end
  end
  return ids
end

-- Whether a queue has jobs that its own tables do not name.
local function has_elsewhere(queue)
  local counted = call('HMGET', B .. ':q:' .. queue, 'scheduled', 'waiting')
  return (tonumber(counted[1]) or 0) + (tonumber(counted[2]) or 0) > call('ZCARD', B .. ':held:' .. queue)
end

-- Whether a record is a scheduled or waiting job of a queue. A job that waits for others does not count, since the
-- queue's own tables name it.
local function is_unready(data, queue)
  local state = data and byte(data, 9)
  if state ~= SCHEDULED and (state ~= WAITING or flagged(byte(data, 10), LINKED)) then return false end
  return sub(data, 32, 31 + byte(data, 31)) == queue
end

-- Return the jobs of a queue that the next entries of a table name, and the cursor behind these entries.
local function scan(place, cursor, queue, most)
  local found, ids, mine = call(SCANS[place][1], B .. ':' .. place, cursor, 'COUNT', most), {}, {}
  local entries = found[2]
  for i = 1, #entries, 2 do
    local id = entries[i]
    if place == 'due' then id = sub(id, 1, 1) == 'j' and sub(id, 2) end
    if place == 'key' then id = Unique.parse(entries[i + 1]).successor end
    if id then ids[#ids + 1] = id end
  end
  read_ahead(ids)
  for _, id in ipairs(ids) do
    if is_unready(jobs[id], queue) then mine[#mine + 1] = id end
  end
  return mine, found[1]
end

-- The ids to delete, and the place to go on from.
function to_purge(queue, most, place)
  if not find_row(queue) then return {}, 'end' end
  if place == 'own' or place == 'last' then
    local ids = in_own_tables(queue, most)
    if #ids > 0 then
      read_ahead(ids)
      return ids, place
    end
    return ids, place == 'own' and has_elsewhere(queue) and 'due 0' or 'end'
  end
  if not has_elsewhere(queue) then return {}, 'last' end
  local name, cursor = string.match(place, '(%a+) (%d+)')
  local ids, follows = scan(name, cursor, queue, most)
  if follows ~= '0' then return ids, name .. ' ' .. follows end
  return ids, SCANS[name][2] and SCANS[name][2] .. ' 0' or 'last'
end

end
