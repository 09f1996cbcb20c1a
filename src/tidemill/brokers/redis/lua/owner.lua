-- Coming and going of owners.
--
-- ARGV  5 verb, 6 owner
--       number   draw a number for an owner that is to attach
--       attach   7 name, 8 kind, 9 record, 10 microseconds of its lease, 11 epoch, 12 number, 13 host
--       join     7 name, 8 kind, 9 record, 10 seconds of its lease, 11 serial: of an owner elsewhere, perhaps once more
--       resume   its calls are made by another process than before: its record, or nothing if it is not elsewhere
--       words    of those elsewhere: {id, lease, words, '1' while the ttr of a message runs that a consumer holds, …}
--       release  7 '' by the account that follows, 'lost' without a witness; 8 '' or 'dead' when it is
--                to be done only if its time is over, or the number it is to have, or 'silent' and its words; then
--                token, cause, …
--       tokens   {token, …} of its leases
--       overdue  7 '' : of the owners whose time is over, {id, record, microseconds since, …}
--       command  7 verb and token, packed
--       list     {record, number, …} of all
-- Returns number and a name of the store (number), how many leases it had (attach, release), 1 or 0 (command); {'moved', where} (attach).

local verb, owner = ARGV[5], ARGV[6]
local K_OWNER, K_BEAT = B .. ':o:' .. owner, B .. ':beat'

-- Until when a consumer is not given up: a message it holds may still be worked on.
local function held_until(id)
  local latest = 0
  for _, lease in ipairs(leases_of(id)) do
    local j = load_job(lease[2])
    if j and j.state == RUNNING then latest = math.max(latest, j.deadline) end
  end
  return latest
end

local function overdue()
  local found = {}
  for _, id in ipairs(call('ZRANGEBYSCORE', K_BEAT, '-inf', now)) do
    local o = call('HMGET', B .. ':o:' .. id, 'record', 'kind')
    local latest = o[2] == 'consumer' and held_until(id) or 0
    if latest > now then
      call('ZADD', K_BEAT, latest, id)
    else
      found[#found + 1] = id
      found[#found + 1] = o[1] or ''
      found[#found + 1] = now - call('ZSCORE', K_BEAT, id)
    end
  end
  return found
end

if verb == 'number' then return {text_of(call('INCR', B .. ':seq')), call('GET', B .. ':born') or '0'} end
if verb == 'tokens' then return call('HKEYS', B .. ':l:' .. owner) end
if verb == 'list' then
  local listed = {}
  for _, id in ipairs(call('ZRANGE', K_BEAT, 0, -1)) do
    local facts = call('HMGET', B .. ':o:' .. id, 'record', 'number')
    listed[#listed + 1] = facts[1]
    listed[#listed + 1] = facts[2] or '0'
  end
  return listed
end
if verb == 'overdue' then return overdue() end

if verb == 'words' then
  local found = {}
  for _, id in ipairs(call('ZRANGEBYSCORE', K_BEAT, '+inf', '+inf')) do
    local o = call('HMGET', B .. ':o:' .. id, 'lease', 'words', 'kind')
    found[#found + 1] = id
    found[#found + 1] = o[1]
    found[#found + 1] = o[2]
    found[#found + 1] = o[3] == 'consumer' and held_until(id) > now and '1' or '0'
  end
  return found
end

if verb == 'resume' then
  local facts = call('HMGET', K_OWNER, 'lease', 'record')
  if not facts[1] then return false end
  ring_rest() -- a hint may have been lost with the process that heard it
  due_moved = true
  finish_step()
  return facts[2]
end

if verb == 'join' then
  local moved, before = departure(), call('HMGET', K_OWNER, 'lease', 'serial')
  if moved then return moved end
  if before[1] or call('EXISTS', K_OWNER) == 0 then
    call('HSET', K_OWNER, 'name', ARGV[7], 'kind', ARGV[8], 'record', ARGV[9], 'lease', ARGV[10], 'epoch', '',
      'number', '0', 'host', '')
    if not before[1] or tonumber(ARGV[11]) > tonumber(before[2]) then
      call('HSET', K_OWNER, 'serial', ARGV[11], 'answer', cmsgpack.pack({'', '', 0, -1, {}, ''}))
    end
    call('HINCRBY', K_OWNER, 'words', 1)
    call('ZADD', K_BEAT, '+inf', owner)
    return 1
  end
  return 0 -- there is another of that id
end

local again = said_before()
if again then return again end

if verb == 'attach' then
  local moved = departure()
  if moved then return moved end
end

if verb == 'command' then
  if call('EXISTS', K_OWNER) == 0 then return say(0) end
  call('RPUSH', B .. ':c:' .. owner, ARGV[7])
  hint_owner(owner)
  return say(1)
end

local many = 0
local name = call('HGET', K_OWNER, 'name')
if name then
  local causes = {}
  for i = 9, verb == 'release' and #ARGV or 0, 2 do causes[ARGV[i]] = ARGV[i + 1] end
  if verb == 'release' and ARGV[8] == 'dead' then
    local beat = call('ZSCORE', K_BEAT, owner)
    if beat and tonumber(beat) > now then return say(0) end -- it lives after all
  elseif verb == 'release' and sub(ARGV[8], 1, 6) == 'silent' then
    if 'silent' .. (call('HGET', K_OWNER, 'words') or '') ~= ARGV[8] then return say(0) end -- it has said something
  elseif verb == 'release' and ARGV[8] ~= '' and call('HGET', K_OWNER, 'number') ~= ARGV[8] then
    return say(0) -- it has come back since
  end
  come_due() -- a lease whose time was over is not given back, it was lost
  local lost = verb == 'release' and ARGV[7] == 'lost' and call('HGET', K_OWNER, 'kind') ~= 'relay' -- which runs nothing
  many = release_leases(owner, name, lost, function(token)
    return causes[string.format('%.0f', token)]
  end)
  if verb == 'release' then hint_owner(owner) end -- if it lives, it shall hear of it
  strike(owner)
  ring_rest() -- a hint it was given and did not follow
  due_moved = true
end
if verb == 'attach' then
  call('HSET', K_OWNER, 'name', ARGV[7], 'kind', ARGV[8], 'record', ARGV[9], 'serial', '0', 'epoch', ARGV[11],
    'number', ARGV[12], 'host', ARGV[13])
  for _, id in ipairs(ARGV[13] ~= '' and call('ZRANGE', K_BEAT, 0, -1) or {}) do -- somebody more to watch
    if call('HGET', B .. ':o:' .. id, 'host') == ARGV[13] then hint_owner(id) end
  end
  call('ZADD', K_BEAT, now + ARGV[10], owner)
  change_roster()
end
finish_step()
return say(many)
