-- The request of an exchange. `x` is the exchange: one table for the whole call.

local open_exchange, read_want, read_request, find_strays

do

-- Renew the owner's lease, and return the exchange of this call with the store's facts about the owner. Nil when the
-- owner is not attached, or was attached anew.
function open_exchange()
  local owner, serial, highest_token, turn, epoch = ARGV[5], unpk('>I8I8I8I2c0', ARGV[6])
  local key = B .. ':o:' .. owner
  local known = call('HMGET', key, 'name', 'kind', 'serial', 'answer', 'last', 'epoch', 'roster', 'handed')
  if not known[1] or known[6] ~= epoch then return nil end
  local on_behalf = serial == 0
  if not on_behalf then call('ZADD', B .. ':beat', now + ARGV[7], owner) end
  if ARGV[7] == 'inf' then call('HINCRBY', key, 'words', 1) end
  HandOff.terms[key] = nil
  local unheard = nil -- the token of a lease that the owner has not heard of
  if known[8] and known[8] ~= '' then
    local its_turn, token = unpk('>I8I8', known[8])
    if its_turn ~= turn then unheard = token end
  end
  return {
    owner = owner, key = key, leases_key = B .. ':l:' .. owner, serial = serial, on_behalf = on_behalf,
    highest_token = highest_token, worker = known[1], consumer = known[2] == 'consumer',
    last_serial = tonumber(known[3]), last_reply = known[4], last_queue = known[5] or '', roster = known[7] or '',
    moved = false, wanted = 0, mode = 0, kind_bits = 0, sleeps = 0, leases = {}, inputs = {},
    turn = 0, unheard = unheard,
    first_token = 0, last_token = -1, settled = {}, touched = {}, held = {},
  }
end

function read_want(x)
  x.has_want = ARGV[8] ~= ''
  if x.has_want then x.wanted, x.mode, x.kind_bits, x.sleeps = unpk('>I4BBB', ARGV[8]) end
  x.moved = departure()
end

-- The offsets of the first and the last argument behind a count, and of the next arguments.
local function range_at(at)
  local after = at + 1 + tonumber(ARGV[at])
  return at + 1, after - 1, after
end

-- The defaults of a verdict. Most verdicts are plain successes, whose small tables leave these fields out.
local PLAIN = {__index = {outcome = 0, delay = 0, hold = false, error = '', traceback = '', followers = 0, rank = -1}}

local function read_verdicts(at, tokens)
  local verdicts, many = {}, tonumber(ARGV[at])
  at = at + 1
  for i = 1, many do
    local data = ARGV[at]
    local token, outcome, delay, started, ended, hold, e, t, followers, rank, from = unpk('>I8BdddBI4I4I4i8', data)
    if outcome + hold + e + t + followers == 0 and rank == -1 then
      verdicts[i] = setmetatable({token = token, started = started, ended = ended, result = sub(data, from)}, PLAIN)
    else
      verdicts[i] = {
        token = token, outcome = outcome, delay = delay, started = started, ended = ended, hold = hold == 1,
        error = sub(data, from, from + e - 1), traceback = sub(data, from + e, from + e + t - 1),
        result = sub(data, from + e + t), followers = followers, rank = rank, first = at + 1,
      }
    end
    at = at + 1 + 4 * followers
    tokens[#tokens + 1] = token
  end
  return verdicts, at
end

local function read_touches(first, last, tokens)
  local touches = {}
  for i = first, last do
    local token, seconds = unpk('>I8d', ARGV[i])
    touches[#touches + 1] = {token, seconds}
    tokens[#tokens + 1] = token
  end
  return touches
end

local function read_notes(first, last, tokens)
  local notes = {}
  for i = first, last do
    local token, done, total, time, text, from = unpk('>I8dddI4c0', ARGV[i])
    notes[#notes + 1] = {token, done, total, time, sub(ARGV[i], from), text}
    tokens[#tokens + 1] = token
  end
  return notes
end

-- Read everything behind the want.
function read_request(x)
  local tokens, queues, named = {}, {}, {}
  local first, last, at = range_at(10)
  for i = first, last do
    queues[#queues + 1] = ARGV[i]
    named[ARGV[i]] = true
  end
  x.verdicts, at = read_verdicts(at, tokens)
  first, last, at = range_at(at)
  x.touches = read_touches(first, last, tokens)
  first, last, at = range_at(at)
  x.notes = read_notes(first, last, tokens)
  x.tokens, x.queues, x.named, x.told_held = tokens, queues, named, ARGV[at]
  first, last = range_at(at + 1)
  x.history = {}
  for i = first, last do x.history[#x.history + 1] = ARGV[i] end
end

-- Find the leases that the store has for the owner and that the owner does not have.
function find_strays(x)
  x.strays = {}
  if x.told_held == '' then return end
  local has = {}
  for i = 5, #x.told_held, 8 do has[text_of((unpk('>I8', x.told_held, i)))] = true end
  if x.unheard then has[text_of(x.unheard)] = true end
  for _, token in ipairs(call('HKEYS', x.leases_key)) do
    if not has[token] then x.strays[#x.strays + 1] = token end
  end
end

end
