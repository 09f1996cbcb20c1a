-- Note, settle, touch, take and lease, in that order, as one step. Here is what the owner hands in; `taking` and
-- `answer` go on in the same function.
--
-- ARGV  5 owner, 6 serial, the highest token it ever had, and epoch, packed, 7 microseconds of its owner lease, inf if it is elsewhere;
--         the serial 0 is that of who speaks on behalf of one elsewhere, and gets what it hands in answered, and no more
--       8 the want, or empty: count, mode (0 fair, 1 strict, 2 merged), kinds (1 tasks, 2 messages, 4 lost ones), sleep
--       9 how many schedules it would see to, 10 queues of the want, then these
--       n verdicts: (token, outcome, delay, started, ended, hold, sizes of error and traceback, followers)
--         rank or -1, with error, traceback and result behind; then its followers, four arguments each
--       n touches: (token, seconds)
--       n notes: (token, done, total, time) with the line behind
--       n leases to take from the carrier: token with the id behind
--       the highest number of an unknown task that it has heard of, -1 if it does not ask; n tasks that it knows of those
--       empty, or, if it asks for strays, 'held' and the tokens of all leases that it has, 8 bytes each
-- Returns 0 when the owner is not on the list (or is there anew); {'moved', where}; {'late', serial} when that was done
--       since; else settled and touched ('0' and '1'; '2' for a verdict whose result there was no room for), leases (fixed
--       part, envelope, …), commands, microseconds until something is due (-1 never), and until the
--       next of the other owners is to be given up; which leases have inputs, and those (id, state, result,
--       error, …); schedules (name, record, …); how the list of owners stands; taken ('0' and '1');
--       the highest number of an unknown task that it has heard of by now, and the names that are new;
--       1 when the step before this one is not known here, or the line broke; tokens of strays

local Unknown = Carrier.Unknown
local owner, serial, told, epoch = ARGV[5], unpk('>I8I8I2c0', ARGV[6])
local K_OWNER, K_LEASES = B .. ':o:' .. owner, B .. ':l:' .. owner
local me = call('HMGET', K_OWNER, 'name', 'kind', 'serial', 'answer', 'last', 'epoch', 'roster')
if not me[1] or me[6] ~= epoch then return 0 end
local worker, consumer, last_queue, behalf = me[1], me[2] == 'consumer', me[5] or '', serial == 0
if not behalf then call('ZADD', B .. ':beat', now + ARGV[7], owner) end
if ARGV[7] == 'inf' then call('HINCRBY', K_OWNER, 'words', 1) end

local leases, inputs, IS_RUNNING = {}, {}, string.char(RUNNING)
local first_token, last_token = 0, -1

local function show_lease(j, token, ttr, envelope, leased)
  leases[#leases + 1] = pack('>I8I4I4I4I8dI8d', token, j.attempt + 1, j.losses, j.rank, j.turn or j.seq,
    j.timeout, leased or now, ttr)
  leases[#leases + 1] = envelope
end

-- Give the last lease the ends of the jobs before it that it asks for.
local function show_inputs(id)
  local wish = flows.links[id] or links_of(id)
  if type(wish) == 'string' and unpk('>I4', wish, LINKS_WAITS + 1) == 0 then return end -- the hot path
  local names, shown = links_of(id).inputs, {}
  if #names == 0 then return end
  read_ahead(names)
  local ends = fetch_all(B .. ':result', names)
  for i, name in ipairs(names) do
    local j = load_job(name)
    shown[#shown + 1] = name
    shown[#shown + 1] = j and j.state or ''
    shown[#shown + 1] = j and (results[name] or ends[i]) or ''
    shown[#shown + 1] = j and j.error or ''
  end
  inputs[#inputs + 1] = #leases / 2 - 1
  inputs[#inputs + 1] = shown
end

-- When the next of the others is to be given up.
local function next_death()
  local beats = call('ZRANGE', B .. ':beat', 0, 1, 'WITHSCORES')
  local at = beats[1] == owner and beats[4] or beats[2]
  return at and at ~= 'inf' and math.max(0, at - now) or -1
end

local function replay(answer)
  for _, lease in ipairs(leases_of(owner)) do
    local j = load_job(lease[2])
    if lease[1] >= answer[3] and lease[1] <= answer[4] and j.token == lease[1] then
      local ttr = j.deadline > 0 and math.max(0, j.deadline - now) / 1000000 or 0
      show_lease(j, j.token, ttr, call('HGET', K_ENV, j.id), j.leased)
      if flagged(j.flags, LINKED) then show_inputs(j.id) end
    end
  end
  return {answer[1], answer[2], leases, answer[5], 0, next_death(), inputs, {}, '', answer[6], {}, 1, {}}
end

if not behalf and tonumber(me[3]) > serial then return {'late', me[3]} end -- it was stuck on its way, and nobody waits for it
if not behalf and tonumber(me[3]) == serial then return replay(cmsgpack.unpack(me[4])) end

local behind = not behalf and tonumber(me[3]) < serial - 1
local wanted, mode, kind_bits, sleeps = 0, 0, 0, 0
if ARGV[8] ~= '' then wanted, mode, kind_bits, sleeps = unpk('>I4BBB', ARGV[8]) end
local moved = departure()
if moved and consumer and wanted > 0 then return moved end

-- -- arguments -------------------------------------------------------------------------------------

local at = 10
local queues, verdicts, touches, notes, takes, asked, knows = {}, {}, {}, {}, {}, -1, {}

local function read_some()
  local many = tonumber(ARGV[at])
  local first = at + 1
  at = first + many
  return first, at - 1
end

do
  local first, last = read_some()
  for i = first, last do queues[#queues + 1] = ARGV[i] end
  local tokens = {}
  local many = tonumber(ARGV[at])
  at = at + 1
  for _ = 1, many do
    local data = ARGV[at]
    local token, outcome, delay, started, ended, hold, e, t, followers, rank, from = unpk('>I8BdddBI4I4I4i8', data)
    verdicts[#verdicts + 1] = {
      token = token, outcome = outcome, delay = delay, started = started, ended = ended, hold = hold == 1,
      error = sub(data, from, from + e - 1), traceback = sub(data, from + e, from + e + t - 1),
      result = sub(data, from + e + t), followers = followers, rank = rank, first = at + 1,
    }
    at = at + 1 + 4 * followers
    tokens[#tokens + 1] = token
  end
  first, last = read_some()
  for i = first, last do
    local token, seconds = unpk('>I8d', ARGV[i])
    touches[#touches + 1] = {token, seconds}
    tokens[#tokens + 1] = token
  end
  first, last = read_some()
  for i = first, last do
    local token, done, total, time, from = unpk('>I8ddd', ARGV[i])
    notes[#notes + 1] = {token, done, total, time, sub(ARGV[i], from)}
    tokens[#tokens + 1] = token
  end
  notes.tokens = tokens
  first, last = read_some()
  for i = first, last do takes[#takes + 1] = {(unpk('>I8', ARGV[i])), sub(ARGV[i], 9)} end
  asked, at = tonumber(ARGV[at]), at + 1
  first, last = read_some()
  for i = first, last do knows[#knows + 1] = ARGV[i] end
end

-- Tokens of leases that are the owner's here, and that it does not have.
local function strays_of(told_held)
  if told_held == '' then return {} end
  local has, strays = {}, {}
  for i = 5, #told_held, 8 do has[text_of((unpk('>I8', told_held, i)))] = true end
  for _, token in ipairs(call('HKEYS', K_LEASES)) do
    if not has[token] then strays[#strays + 1] = token end
  end
  return strays
end

local strays = strays_of(ARGV[at])

-- -- what it says ----------------------------------------------------------------------------------

local held = {} -- token → id, as the list of leases has it

-- Those jobs of some, just read, that hang together with others.
local function linked_of(ids)
  local linked = {}
  for _, id in ipairs(ids) do
    local data = jobs[id]
    if type(data) == 'string' and byte(data, 10) >= LINKED and flagged(byte(data, 10), LINKED) then
      linked[#linked + 1] = id
    end
  end
  return linked
end

local function mine(token)
  local j = held[token] and load_job(held[token])
  return j and j.state == RUNNING and j.token == token and j.owner == owner and j or nil
end

local function note(token, done, total, time, line)
  local j = mine(token)
  if not j then return end
  if done >= 0 then call('SET', B .. ':p:' .. j.id, pack('>dd', done, total)) end
  if line ~= '' then log(j.id, line, time) end
  if not flagged(j.flags, NOTED) then
    j.flags = j.flags + NOTED
    save(j)
  end
end

local function touch(token, seconds)
  local j = mine(token)
  if not j then return '0' end
  if j.deadline > 0 then
    local ttr = seconds > 0 and seconds or (j.ttr > 0 and j.ttr or 60)
    j.deadline = now + math.floor(ttr * 1000000)
    add_due(j.deadline, 'l' .. j.id)
    save(j)
  end
  return '1'
end

local more = come_due(true)
Carrier.Room.fit(verdicts, notes)
local settled, touched = {}, {}
do
  local tokens, texts, ids = notes.tokens, {}, {}
  for i, token in ipairs(tokens) do texts[i] = text_of(token) end
  for i, id in ipairs(fetch_all(K_LEASES, texts)) do
    if id then
      held[tokens[i]] = id
      ids[#ids + 1] = id
    end
  end
  read_ahead(ids)
  read_links_ahead(linked_of(ids))
  Lanes.read_ahead(ids)
end
for _, n in ipairs(notes) do note(unpack(n)) end
for i, v in ipairs(verdicts) do
  local id = held[v.token]
  local data = id and jobs[id]
  if type(data) == 'string' and succeed_plainly(id, data, owner, worker, v) then
    settled[i] = '1'
  else
    local carried = v.outcome == Carrier.OUTCOME and not moved and type(data) == 'string'
      and Carrier.carry_plainly(id, data, owner, v.token)
    local j = not carried and mine(v.token)
    settled[i] = (carried or j) and '1' or '0'
    if carried or j and v.outcome == Carrier.OUTCOME and not moved and Carrier.carry(j) then
      follow(v.first, v.followers)
    elseif j then
      if v.outcome == Carrier.OUTCOME then Carrier.decline(v) end
      close_attempt(j, worker, v)
      follow(v.first, v.followers)
    end
  end
end
Carrier.Room.flags(settled, verdicts)
Carrier.flush()
for i, t in ipairs(touches) do touched[i] = touch(t[1], t[2]) end
