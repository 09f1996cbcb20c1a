-- Change a limit by name. The change reaches the limit's partitions piece by piece, in the order of their
-- keys: a walk.
--
-- During the walk, B:walk has the last partition reached, and the settings behind that partition. Each partition
-- keeps the old settings until the walk reaches it, so the ready lines are right at all times. An entry in B:due makes
-- the next caller do the next piece. When the settings change again during a walk, the walk begins anew; partitions
-- that it has not reached keep the settings they had.
--
--   B:walk     NAME → 1, size and key of the last partition that was reached, or 0; then for the partitions behind:
--              settings, size and key of the last partition they hold for; the last settings hold for all that follow

do

local IF_NEW = 16 -- a bit beside the bits of the settings: the job declares its limit only if the limit is not known

-- Compare keys by bytes, as the server sorts them: see number_in.
local function comes_after(one, other)
  for i = 1, math.min(#one, #other) do
    local a, b = byte(one, i), byte(other, i)
    if a ~= b then return a > b end
  end
  return #one > #other
end

function Settings.walk_of(limit)
  local data = call('HGET', B .. ':walk', limit)
  if not data then return nil end
  local begun, position, at = unpk('>BI2c0', data)
  local walk = {position = begun == 1 and position or nil}
  while at <= #data do
    local part = {packed = sub(data, at, at + Limiter.SETTINGS_SIZE - 1)}
    part.last, at = unpk('>I2c0', data, at + Limiter.SETTINGS_SIZE)
    walk[#walk + 1] = part
  end
  return walk
end

local function write_walk(limit, walk)
  local position = walk.position or ''
  local data = {pack('>BI2c0', walk.position and 1 or 0, #position, position)}
  for i, part in ipairs(walk) do data[i + 1] = part.packed .. pack('>I2c0', #part.last, part.last) end
  call('HSET', B .. ':walk', limit, table.concat(data))
end

-- The settings that hold for a partition.
function Settings.of_partition(name)
  local limit, key = Partitions.split(name)
  local known = Settings.known('n', limit)
  local walk = known.walk
  if not walk or walk.position and not comes_after(key, walk.position) then return Limiter.settings(known.packed) end
  for i, part in ipairs(walk) do
    if i == #walk or not comes_after(key, part.last) then return Limiter.settings(part.packed) end
  end
end

-- The next partitions for a walk, stored ones and new ones of this call; also the last key, nil at the end of a walk.
local function next_partitions(limit, walk)
  local from = walk.position and '(' .. limit .. '\0' .. walk.position or '[' .. limit .. '\0'
  local names = call('ZRANGEBYLEX', B .. ':lanes', from, '(' .. limit .. '\1', 'LIMIT', 0, limits.left)
  local last = #names == limits.left and select(2, Partitions.split(names[#names])) or nil
  local missing = {}
  for _, name in ipairs(names) do
    if limits.partitions[name] == nil then missing[#missing + 1] = name end
  end
  for i, data in ipairs(fetch_all(B .. ':lane', missing)) do limits.partitions[missing[i]] = data or nil end
  for name, partition in pairs(limits.partitions) do
    local whose, key = Partitions.split(name)
    if whose == limit and type(partition) == 'table' and partition.is_new and not (walk.position and not comes_after(key, walk.position))
      and not (last and comes_after(key, last)) then
      names[#names + 1] = name
    end
  end
  return names, last
end

local function go_on_later(limit, walk)
  write_walk(limit, walk)
  limits.walking = true
  add_due(now, 'w' .. limit)
end

-- Carry a change into the next partitions, as many as this call may still reach.
function Partitions.walk(limit)
  local known = Settings.known('n', limit)
  if not known or not known.walk then return end
  local walk, new = known.walk, Limiter.settings(known.packed)
  if limits.left <= 0 then return go_on_later(limit, walk) end
  local names, last = next_partitions(limit, walk)
  limits.left = limits.left - #names
  for _, name in ipairs(names) do
    Limiter.change(Settings.of_partition(name), new, Partitions.of(name).limiter)
    Partitions.make_stale(name)
  end
  if not last then
    known.walk = nil
    call('HDEL', B .. ':walk', limit)
    return
  end
  walk.position = last
  while #walk > 1 and not comes_after(walk[1].last, last) do table.remove(walk, 1) end
  go_on_later(limit, walk)
end

-- Set the settings of a limit by name.
function Partitions.set(limit, packed, declared)
  local is_new = not Settings.known('n', limit)
  local old, _, old_packed = Settings.set('n', limit, packed, declared)
  if not old or is_new then return end
  local known = Settings.known('n', limit)
  local before = known.walk
  if not before then
    known.walk = {{packed = old_packed, last = ''}}
  elseif before.position then
    known.walk = {{packed = old_packed, last = before.position}, unpack(before)}
  end
  Partitions.walk(limit)
end

-- Declare the limit of a job that is being stored. The job's wish ends with the settings. With `if_new`
-- the settings do not change a known limit.
function Partitions.declare(name, wish, if_new)
  local limit, packed = Partitions.split(name), sub(wish, -Limiter.SETTINGS_SIZE)
  local which = byte(packed)
  if which >= IF_NEW then if_new, packed = true, string.char(which - IF_NEW) .. sub(packed, 2) end
  if not if_new or not Settings.known('n', limit) then Partitions.set(limit, packed, true) end
end

end
