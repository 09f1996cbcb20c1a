-- Attach, watch and release owners.
--
-- ARGV  5 verb, 6 owner
--       number   draw a number for an owner that is about to attach: {number, name of the store}
--       attach   7 name, 8 kind, 9 record, 10 microseconds of its owner lease, 11 epoch, 12 number, 13 host
--       join     7 name, 8 kind, 9 record, 10 seconds of its owner lease, 11 serial: list a remote owner, perhaps again
--       resume   another process makes the owner's calls from now on: its record, or nothing if no remote owner
--       words    {id, lease, words, 1 while a consumer holds a message whose ttr runs, else 0, …} of all remote owners
--       release  7 '' with the causes that follow, 'lost' without a witness; 8 the condition: '', 'dead' (its time is
--                over), a number (the owner still has it), or 'silent' and words (no call since); then token, cause, …
--       command  7 token and verb, packed
--       list     {record, number, microseconds since its time was over, negative before, …} of all owners
-- Returns for attach and release the number of leases that the owner had, or -1 for a release that did nothing; for
--       join 1, or 0 when a local owner has the id; for command 1, or 0 when the owner is not listed; {'moved', where}
--       (attach, join).

-- The time until which a consumer is not given up, since it may still work on a message.
local function held_until(id)
  local latest = 0
  for _, lease in ipairs(leases_of(id)) do
    local j = load_job(lease[2])
    if j and j.state == RUNNING then latest = math.max(latest, j.deadline) end
  end
  return latest
end

-- Draw a number for an owner, and name the store by its time of creation.
local function number() return {text_of(call('INCR', B .. ':seq')), call('GET', B .. ':born') or '0'} end

local function list()
  local listed, beats = {}, call('ZRANGE', B .. ':beat', 0, -1, 'WITHSCORES')
  for i = 1, #beats, 2 do
    local id, over = beats[i], tonumber(beats[i + 1])
    local facts = call('HMGET', B .. ':o:' .. id, 'record', 'number', 'kind')
    if over <= now and facts[3] == 'consumer' then over = math.max(over, held_until(id)) end
    listed[#listed + 1] = facts[1]
    listed[#listed + 1] = facts[2] or '0'
    listed[#listed + 1] = over < math.huge and now - over or -1
  end
  return listed
end

-- How often each remote owner has called: its signs of life.
local function words()
  local found = {}
  for _, id in ipairs(call('ZRANGEBYSCORE', B .. ':beat', '+inf', '+inf')) do
    local o = call('HMGET', B .. ':o:' .. id, 'lease', 'words', 'kind')
    found[#found + 1] = id
    found[#found + 1] = o[1]
    found[#found + 1] = o[2]
    found[#found + 1] = o[3] == 'consumer' and held_until(id) > now and '1' or '0'
  end
  return found
end

-- Another process makes the calls of a remote owner from now on.
local function resume(owner)
  local facts = call('HMGET', B .. ':o:' .. owner, 'lease', 'record')
  if not facts[1] then return false end
  ring_rest() -- a hint may have been lost with the process that received it
  due_moved = true
  finish_step()
  return facts[2]
end

-- List a remote owner; 0 when a local owner has its id.
local function join(owner)
  local key = B .. ':o:' .. owner
  local moved, before = departure(), call('HMGET', key, 'lease', 'serial')
  if moved then return moved end
  if not before[1] and call('EXISTS', key) == 1 then return 0 end
  call('HSET', key, 'name', ARGV[7], 'kind', ARGV[8], 'record', ARGV[9], 'lease', ARGV[10], 'epoch', '',
    'number', '0', 'host', '')
  if not before[1] or tonumber(ARGV[11]) > tonumber(before[2]) then
    call('HSET', key, 'serial', ARGV[11], 'answer', cmsgpack.pack({'', '', 0, -1, {}, ''}))
  end
  call('HINCRBY', key, 'words', 1)
  call('ZADD', B .. ':beat', '+inf', owner)
  return 1
end

local function command(owner)
  if call('EXISTS', B .. ':o:' .. owner) == 0 then return cache_reply(0) end
  call('RPUSH', B .. ':c:' .. owner, ARGV[7])
  hint_owner(owner)
  return cache_reply(1)
end

-- True when the condition of a release no longer holds: the owner has shown since that it lives.
local function lives_after_all(owner, witness)
  local key = B .. ':o:' .. owner
  if witness == 'dead' then
    local beat = call('ZSCORE', B .. ':beat', owner)
    return beat and tonumber(beat) > now
  end
  if sub(witness, 1, 6) == 'silent' then return 'silent' .. (call('HGET', key, 'words') or '') ~= witness end
  return witness ~= '' and call('HGET', key, 'number') ~= witness
end

-- Give back all leases of an owner; `causes` says by token how runs died. Returns the number of leases.
local function release_all(owner, name, lost, causes)
  come_due() -- a lease whose ttr has passed is a failed attempt, and does not go back
  flush() -- such a lease must not be read once more below
  return release_leases(owner, name, lost, function(token) return causes[string.format('%.0f', token)] end)
end

local function remove(owner)
  remove_owner(owner)
  ring_rest() -- the owner may have received a hint and not followed it
  due_moved = true
end

local function release(owner)
  local name, causes, many = call('HGET', B .. ':o:' .. owner, 'name'), {}, -1
  if name then
    if lives_after_all(owner, ARGV[8]) then return cache_reply(many) end
    for i = 9, #ARGV, 2 do causes[ARGV[i]] = ARGV[i + 1] end
    many = release_all(owner, name, ARGV[7] == 'lost', causes)
    hint_owner(owner) -- if the owner lives, it hears of the release
    remove(owner)
  end
  finish_step()
  return cache_reply(many)
end

local function attach(owner)
  local moved = departure()
  if moved then return moved end
  local key, many = B .. ':o:' .. owner, 0
  local name, host = call('HGET', key, 'name'), ARGV[13]
  if name then
    many = release_all(owner, name, false, {})
    remove(owner)
  end
  call('HSET', key, 'name', ARGV[7], 'kind', ARGV[8], 'record', ARGV[9], 'serial', '0', 'epoch', ARGV[11],
    'number', ARGV[12], 'host', host)
  for _, id in ipairs(host ~= '' and call('ZRANGE', B .. ':beat', 0, -1) or {}) do -- its neighbours shall watch it
    if call('HGET', B .. ':o:' .. id, 'host') == host then hint_owner(id) end
  end
  call('ZADD', B .. ':beat', now + ARGV[10], owner)
  note_owners_changed()
  finish_step()
  return cache_reply(many)
end

local ONCE = {attach = attach, command = command, release = release}
local OTHERS = {number = number, list = list, words = words, resume = resume, join = join}

function Verbs.owners()
  local verb, owner = ARGV[5], ARGV[6]
  if OTHERS[verb] then return OTHERS[verb](owner) end
  local again = cached_reply()
  if again then return again end
  return ONCE[verb](owner)
end
